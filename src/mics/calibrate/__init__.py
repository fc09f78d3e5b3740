"""``mics calibrate``: measures the cluster it runs on, and writes the file that plans and choices read."""
