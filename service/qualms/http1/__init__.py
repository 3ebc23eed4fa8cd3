"""The HTTP/1.1 server: parsing, limits, timeouts, pipelining, connections and their end."""
