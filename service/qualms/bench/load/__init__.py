"""Load for servers: connections that send requests, in a closed or an open loop, and the images that they send."""
