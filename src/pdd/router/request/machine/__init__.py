"""What happens to an answer at every event. Pure. Begin at ``table``: the functions it names are here."""
