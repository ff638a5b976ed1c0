"""What proves a set-up before money is spent: measurements of the exchange and of scaling, made here."""
