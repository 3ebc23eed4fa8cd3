"""Checks of hostile bundles, before their bytes cost memory: the protobuf message, the graph, the JSON text."""
