"""The recipes: one folder per technique, each an experiment against a named control (see `recipes/README.md`)."""
