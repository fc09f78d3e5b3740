"""Other people's trainers. Each module imports its host, and nothing here imports them."""
