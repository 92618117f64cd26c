"""The GPT that every recipe trains: its shapes, its initialisation, its arithmetic and its Hugging Face form."""
