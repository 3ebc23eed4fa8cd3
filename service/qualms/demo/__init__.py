"""Digits drawn by our own code, and traffic made of them: something to look at without anybody's data."""
