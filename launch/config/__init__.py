"""From flags, a DeepSpeed JSON and a preset to one resolved configuration; what is refused, and `--explain`."""
