"""The bill of materials of an image; ``test_image.py`` compares a real one with its image."""

import bill

DPKG = "libc6\t2.36-9+deb12u13\tamd64\tii \nlibssl3\t3.0.17-1~deb12u3\tamd64\tii \nold\t1\tamd64\trc \n"
FOUND = {
    "bomFormat": "CycloneDX",
    "components": [{"type": "library", "name": "numpy", "version": "2.4.6", "bom-ref": "numpy==2.4.6"}],
    "dependencies": [{"ref": "numpy==2.4.6"}],
    "metadata": {"tools": {}},
}


def test_installed_debian_packages_are_listed_by_their_package_url() -> None:
    assert [package["purl"] for package in bill.debian(DPKG, "debian-12")] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
        "pkg:deb/debian/libssl3@3.0.17-1~deb12u3?arch=amd64&distro=debian-12",
    ]


def test_all_components_are_in_one_document_about_the_image() -> None:
    others = [*bill.debian(DPKG, "debian-12"), bill.interpreter("3.11.9")]
    made = bill.bill_of_materials(FOUND, others, "bf16kit:server", "0.1.0")
    assert [component["name"] for component in made["components"]] == ["numpy", "libc6", "libssl3", "python"]
    assert made["metadata"]["component"]["name"] == "bf16kit:server"
    assert made["metadata"]["tools"] == {}
    (of_image,) = [held for held in made["dependencies"] if held["ref"] == "bf16kit:server@0.1.0"]
    assert of_image["dependsOn"] == [component["bom-ref"] for component in made["components"]]
    assert bill.bill_of_materials(FOUND, others[::-1], "bf16kit:server", "0.1.0") == made, "whatever the order found"
