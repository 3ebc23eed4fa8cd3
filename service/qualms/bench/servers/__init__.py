"""The servers under load: their processes, the CPU time, memory and instructions that they use, and the plain server."""
