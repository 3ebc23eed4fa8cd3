"""The page at `/`: static files without a build step, and the drawn digits that it offers as samples."""
