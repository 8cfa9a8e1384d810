//! Routers of synthetic mixtures that choose some experts more often than others, as real ones do: benchmarks of experts that do not fit would mean little without.

use crate::{
    Config, ForgeError,
    families::Programs,
    pen::{Formula, Recipe},
};
use qhx_ir::{Checked, Name, OpKind};

/// The configuration's field: an expert of rank `r` is chosen about as often as `1 / r^S`.
pub const ROUTER_SKEW: &str = "router_skew";
/// Beyond that two experts get everything.
const LARGEST: f64 = 4.0;

/// Scales the rows of all routers, if the configuration says so: the scores of an expert with smaller weights are seldom the largest. Which expert has which rank differs
/// from layer to layer.
pub(crate) fn skew_routers(programs: &mut Programs, config: Config<'_>) -> Result<(), ForgeError> {
    let Some(skew) = config.number_if_any(ROUTER_SKEW)? else { return Ok(()) };
    if !(0.0..=LARGEST).contains(&skew) {
        return Err(config.error(ROUTER_SKEW, format!("must be 0 to {LARGEST}, found {skew}")));
    }
    for written in &mut programs.programs {
        for (layer, weight) in routers(&written.program).into_iter().enumerate() {
            let shape = written.program.weights[&weight].shape.clone();
            let experts = shape[0];
            let factors = (0..experts).map(|expert| (((expert + 7 * layer) % experts + 1) as f64).powf(-skew) as f32).collect();
            let Some(Recipe::Copy(tensor)) = written.recipes.get(&weight).cloned() else {
                return Err(config.error(ROUTER_SKEW, format!("cannot be had with this precision: `{weight}` is not stored as it is")));
            };
            let formula = Formula::ScaleRows(factors);
            written.recipes.insert(weight, Recipe::Computed { tensors: vec![tensor], shapes: vec![shape], formula });
        }
    }
    Ok(())
}

/// The weights of the routers, layer by layer.
fn routers(program: &Checked) -> Vec<Name> {
    let weight = |scores: &Name| match program.maker(scores).map(|place| &program.ops[place].op) {
        Some(OpKind::Linear { weight, .. }) => Some(weight.clone()),
        _ => None,
    };
    let scores = program.ops.iter().filter_map(|op| if let OpKind::Route { scores, .. } = &op.op { Some(scores) } else { None });
    scores.filter_map(weight).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Material, Precision, plan::PrecisionPlan, rotate::Rotations};
    use serde_json::{Value, json};

    fn programs(skew: Option<Value>) -> Result<Programs, ForgeError> {
        let mut config: Value = serde_json::from_str(include_str!("../../../fixtures/phimoe/config.json")).unwrap();
        skew.into_iter().for_each(|skew| config[ROUTER_SKEW] = skew);
        Material::Synthetic { config, seed: 1 }.programs(&PrecisionPlan::from(Precision::W8))
    }

    #[test]
    fn routers_are_scaled_by_rank() {
        let factors = |skew: f64| -> Vec<Vec<f32>> {
            let recipes = programs(Some(json!(skew))).unwrap().programs.remove(0).recipes;
            let scaled = recipes.into_values().filter_map(|recipe| match recipe {
                Recipe::Computed { formula: Formula::ScaleRows(factors), .. } => Some(factors),
                _ => None,
            });
            scaled.collect()
        };
        let found = factors(1.0);
        assert_eq!((found.len(), &found[0][..]), (3, &[1.0, 0.5, 1.0 / 3.0, 0.25, 0.2][..]));
        assert_ne!(found[0], found[1], "another order in each layer");
        assert!(factors(0.0).iter().flatten().all(|factor| *factor == 1.0));
        let plain = programs(None).unwrap().programs.remove(0).recipes;
        assert!(plain.values().all(|recipe| !matches!(recipe, Recipe::Computed { .. })));
        let error = programs(Some(json!(-1))).err().unwrap().to_string();
        assert!(error.contains("router_skew") && error.contains("0 to 4"), "{error}");
    }

    #[test]
    fn routers_behind_a_rotated_stream_are_scaled_too() {
        let mut config: Value = serde_json::from_str(include_str!("../../../fixtures/phimoe/config.json")).unwrap();
        config[ROUTER_SKEW] = json!(1);
        let plan = PrecisionPlan { rotations: Rotations::ALL, ..PrecisionPlan::from(Precision::W8) };
        let written = Material::Synthetic { config, seed: 1 }.programs(&plan).unwrap().programs.remove(0);
        let routers = routers(&written.program);
        let recipe_of = |router: &Name| format!("{:?}", written.recipes[router]);
        assert_eq!(routers.len(), 3);
        assert!(routers.iter().map(recipe_of).all(|recipe| recipe.starts_with("Rotated") && recipe.contains("ScaleRows")));
    }
}
