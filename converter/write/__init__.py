"""Writing an artifact's weights, graphs, traced files and exports, and reading back what was written."""
