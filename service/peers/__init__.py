"""The processes of one server, started and led by one of them: their messages, and their supervision."""
