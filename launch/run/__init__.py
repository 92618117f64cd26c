"""What a run is: its configuration, its folder, its checkpoints. Nothing here imports torch at module level."""
