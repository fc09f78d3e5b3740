"""mics and its peers side by side: the same job, trained by each system behind one small interface."""
