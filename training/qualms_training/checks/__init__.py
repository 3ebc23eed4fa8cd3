"""Checks of a frozen base on a few images, in seconds, before the stages that take long."""
