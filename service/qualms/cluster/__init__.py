"""Work on a Ray cluster: the connection, and results in order from many nodes. Ray is imported only when it is used."""
