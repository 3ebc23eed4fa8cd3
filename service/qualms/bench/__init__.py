"""How fast the service is, told as shares: of what the machine can do, and of what a plain server does beside it."""
