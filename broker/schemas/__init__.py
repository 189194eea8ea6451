"""The schema registry: the versions of topics' schemas, and the rules between versions."""
