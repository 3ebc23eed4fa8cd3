"""Methods that train a small model on the features of the frozen base: a meta-model, a new last layer, probes."""
