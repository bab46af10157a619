"""The target model: its parts, what of it can be driven, how its layers are tapped and its attention switched."""
