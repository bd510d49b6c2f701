"""Who may come to a master, as what, and how much he may ask; and what the audit log says of it."""
