"""The train worker and its parts."""
