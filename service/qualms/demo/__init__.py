"""`qualms demo`: digits drawn by our own code and traffic made of them, to try the service without a data set."""
