"""The paper's tables made again: many methods on one frozen base, under two protocols, over seeds."""
