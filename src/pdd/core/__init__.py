"""Values and rules that everything else is built from; knows no I/O, no clock and no other package of PDD."""
