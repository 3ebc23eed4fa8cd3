"""Methods that compute scores from the logits and features of the frozen base without training a network."""
