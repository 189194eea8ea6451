"""The schema registry: versions of the schemas of topics, and what must hold between them."""
