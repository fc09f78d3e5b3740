"""Token shards: preparing, reading, mixing, masking."""
