"""Where images come from: folders, npz files, Python objects, downloads, and images that our own code draws."""
