"""Methods that train a head, a meta-model or a last layer on frozen features."""
