"""Place and deadline: the thin Ray shells around the plain objects, and the only places that wait for them."""
