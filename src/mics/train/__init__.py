"""``mics train``: a small, complete training program on the public interface of mics."""
