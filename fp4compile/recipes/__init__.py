"""The recipes, one YAML file each."""
