"""Tables and plots from records. Imports no torch."""
