"""How processes that a person starts by hand find each other and become one job; nothing that trains."""
