"""Codecs: how a contribution is written on the wire. A new one is one file, and one row in the table here."""
