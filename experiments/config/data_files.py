"""YAML files that are data: the suites, sweeps and papers of conf/, one folder and one model for each kind.

Imports neither torch nor Hydra.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from experiments.records.record import ROOT
from launch.errors import UserError
from launch.words import there_are

CONF = ROOT / "conf"


class PlainData(BaseModel):
    """Plain values, each key checked. A key that nobody knows is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Kind = TypeVar("Kind", bound=PlainData)


@dataclass(frozen=True)
class DataFiles(Generic[Kind]):
    """The files of conf/<name>, which hold a `model` each. name: what messages call one, too."""

    name: str
    model: type[Kind]

    @property
    def folder(self) -> Path:
        return CONF / self.name

    def names(self) -> list[str]:
        """All files of the folder."""
        return sorted(p.stem for p in self.folder.glob("*.yaml"))

    def load(self, name: str | Path) -> Kind:
        """The content of a file, by its name, or by its path where that ends with .yaml. Raises UserError."""
        path = Path(name) if Path(name).suffix == ".yaml" else self.folder / f"{name}.yaml"
        try:
            return self.model.model_validate(yaml.safe_load(path.read_bytes()))
        except OSError:
            known = there_are(str(name), self.names(), ", or the path of a YAML file")
            raise UserError(f"no {self.name} '{name}'{known}") from None
        except ValidationError as error:
            first = error.errors()[0]
            said = first["msg"].removeprefix("Value error, ")
            where = ".".join(map(str, first["loc"]))
            raise UserError(": ".join(filter(None, [str(path), where, said[0].lower() + said[1:]]))) from None
        except (yaml.YAMLError, ArithmeticError) as error:
            said = " ".join(str(error).split())[:150]
            raise UserError(f"{path} is not a readable {self.name}: {said}") from None
