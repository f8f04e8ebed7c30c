"""A cluster on machines that one owns: brought up and taken down from one place, over ssh."""
