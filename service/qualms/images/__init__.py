"""Image files and pixel arrays to a model's input, through one preprocessing path."""
