from zero3.estimate.formulas import main

main()
