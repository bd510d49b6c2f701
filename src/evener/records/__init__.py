"""What passes between rooms: the frozen structs of a run, its events and its errors. No room is needed to read them."""
