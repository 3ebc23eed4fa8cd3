"""Our own base classifiers: the architectures of the paper and smaller ones."""
