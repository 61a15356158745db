"""How commands start runs, find those that have been made, and end."""
