"""The harness: describes, runs, records and compares experiments. Imports `birder`, is never imported by it."""
