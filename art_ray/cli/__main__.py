"""`python -m art_ray.cli`, where the script `art-ray` is not on the path."""

from art_ray.cli import main

main()
