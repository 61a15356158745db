"""What tests share: ranks, references, made-up data, stand-ins for machines."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
