"""Other people's formats: torch.distributed.checkpoint's, torch.save's archives, pickles, safetensors.

Each is described by the records of a checkpoint (``checkpoint/records.py``), so that one reader serves all.
Nothing here knows how mics saves and loads. ``checkpoint/opening.py`` says which one a folder has.
"""
