"""From flags, an engine JSON and a preset to one resolved configuration; what is refused, and `--explain`."""
