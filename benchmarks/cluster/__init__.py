"""Several hosts on one Linux machine, joined by a slow network; see README.md here."""
