"""The viewer: one local page that shows slides with everything that is known about them."""
