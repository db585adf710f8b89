"""python -m jaxrl.doctor: see `jaxrl.cli.doctor`."""

from jaxrl.cli.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
