"""From the command line to a checked RunSpec."""
